"""The mesh and its collectives: tensor, pipeline, data, expert and context parallel layouts, and how ranks are launched.

Empty until an engine spans several devices. Will know: axes, groups, transfers. Will refuse to know: models and schedules.
"""
