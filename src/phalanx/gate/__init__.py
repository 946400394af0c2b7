"""How the processes of a run reach and trust each other: proofs, encryption, and the sockets that strangers connect to.
It knows nothing of the messages that follow."""
