-- Frees the place of a client that is deleted. KEYS: as in `place`. ARGV: its name.

free_place(KEYS[1], KEYS[2], ARGV[1])
return {'OK'}
