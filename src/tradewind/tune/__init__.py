"""Choosing by measurement: plans compared on a user's own traffic.

Empty until the simulator can price a plan. Will know: candidates and figures. Will refuse to know: how an engine works inside.
"""
