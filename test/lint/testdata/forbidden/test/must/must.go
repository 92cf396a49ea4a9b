package must
