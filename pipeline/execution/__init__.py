"""Any Ray Data run, whatever goes through it: this room knows no video and no question."""
