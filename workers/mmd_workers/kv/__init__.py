"""KV on its way between workers: links between pairs of them, pieces that travel on links, leases on reservations."""
