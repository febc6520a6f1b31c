"""One step of an ODE filter: its state, its phases, step sizes, calibration, and ensemble members."""
