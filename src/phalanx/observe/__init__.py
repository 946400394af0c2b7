"""What a run leaves behind and shows while it goes: progress, step rows, the run record. No torch."""
