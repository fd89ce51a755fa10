"""Which tokens are kept where: pools, one prefix tree, leases. Decides and counts; moves no bytes and imports no torch."""
