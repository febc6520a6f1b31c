"""How a solve runs: the loop, the compiled programs, and what the host does between them."""
