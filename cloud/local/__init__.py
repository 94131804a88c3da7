"""The local cloud: VMs are processes of this machine (Linux) on a simulated spot market.

provider.LocalProvider --HTTP on a Unix socket--> server (a process of its own)
                                                  ├── state: VMs, capacity, prices; pure
                                                  ├── market: timeline of events; pure
                                                  └── processes: kill or stop a whole VM
"""
