"""What a model's text says: content, reasoning and tool calls, told apart while the text arrives.

Knows: the formats in which models write reasoning and calls (`table.py` lists them), what a tool definition must look like.
Refuses to know: token ids, HTTP shapes, how a grammar is compiled; a parser only says how a call is spelled (`GrammarHint`).

There is one path: a whole answer is the sum of the pieces of its stream (`pieces.collect`).
"""
