"""The user's own hosts as a cloud: reached over SSH, taken and given back.

provider.SshProvider ── line.Line (one a host) ── session.Session ──SSH──> on_host
                                                  tunnel.Tunnel  <──SSH─── agents' calls
on the host:  on_host (while somebody is connected)   keeper ── agent ── supervisor
"""
