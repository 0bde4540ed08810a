// A table of tensors in rows of TABLE_WIDTH uvec4 (engine/ops/tensor_table.py). Work items are numbered through all
// tensors: row i starts with item TABLE_FIRST(i), which grows from row to row. Define both before including this.

// The row that has this item: the last whose first item is not beyond it.
uint table_row(uint item) {
    uint low = 0, high = args.num_tensors - 1;
    while (low < high) {
        const uint middle = (low + high + 1) / 2;
        if (TABLE_FIRST(middle) <= item) low = middle;
        else high = middle - 1;
    }
    return low;
}
