"""Propose, verify, learn: n-gram, draft models, heads.

Empty until the first drafter; rows of a step carry `drafts` already. Will know: guesses and their acceptance.
Will refuse to know: the queue.
"""
