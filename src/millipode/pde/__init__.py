"""Discretised PDEs on regular grids: stencils, bases, linear parts. Nothing here knows of filters."""
