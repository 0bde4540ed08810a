// The mask of a block fold without one: every held row sees every streamed row.
int seen_limit(uint batch) { return int(args.num_streamed); }
ivec2 seen_of_row(int row, int limit, uint batch) { return ivec2(0, limit); }
ivec2 seen_of_rows(int first, int past, int limit, uint batch) { return ivec2(0, limit); }
