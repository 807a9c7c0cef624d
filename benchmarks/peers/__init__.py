"""Drivers: each runs one system in a process of its own and prints one line of JSON. They share `shared` and no more.

PEERS names the systems that ours is measured beside, and what pip installs for each; ORACLES those that only lend
their functions to `python -m benchmarks.oracles`.
"""

PEERS = {
  "tunix": ("google-tunix==0.1.7",),
  "trl": ("torch==2.13.0", "trl==1.16.0", "datasets"),
}

ORACLES = {
  "verl": ("torch==2.13.0", "verl==0.9.1", "tensordict<=0.10"),
  "rlax": ("rlax==0.1.9",),
}
