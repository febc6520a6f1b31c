"""How JAX programs are compiled, differentiated, and made to write in place."""
