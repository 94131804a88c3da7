"""The local cloud: VMs are processes of this machine (Linux) on a played spot market.

provider.LocalProvider --HTTP on a Unix socket--> server (a process of its own)
                                                  ├── state: VMs, capacity, prices; pure
                                                  ├── market: what happens when; pure
                                                  └── processes: kill or stop a whole VM
"""
