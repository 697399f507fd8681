"""What measures; every figure in the documentation was printed from here."""
