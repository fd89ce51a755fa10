"""The real scheduler without a device: a scripted executor and clocks. Imports no torch."""
