"""How the processes of a run reach and trust each other: proofs, encryption, and the doors that strangers knock at. It
knows nothing of what is said afterwards."""
