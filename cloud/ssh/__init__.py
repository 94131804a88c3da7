"""The user's own hosts as a cloud: reached over SSH, taken and given back.

provider.SshProvider ── line.Line (one a host) ── session.Session ──SSH──> host_agent
                                                  tunnel.Tunnel  <──SSH─── agents' calls
on the host:  host_agent (while somebody is connected)   keeper ── agent ── supervisor
"""
