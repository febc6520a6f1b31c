"""Discretised PDEs on regular grids: stencils, bases and linear parts. Nothing here depends on filters."""
