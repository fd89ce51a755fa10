"""Prefill here, decode there: tickets, transport, and the peer engine as one more cache tier.

Empty until then. Will know: whose pages are where. Will refuse to know: how a request is scheduled on either side.
"""
