"""VMs reached over SSH: the user's own hosts, and VMs rented from any cloud.

hosts.SshProvider, rented.RentedVmProvider ── transport.HostConnection (one per host)
    transport.Session ──SSH──> on_vm.host_agent
    transport.Tunnel  <──SSH── calls of the agent
on the host: host_agent (while connected), keeper ── agent ── supervisor
"""
