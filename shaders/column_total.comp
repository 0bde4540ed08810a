// Second stage of a sum over rows: adds the partial rows in order; then to what `y` holds when accumulate is set.
#include "rows.glsl"

void main() {
    const uint cols = args.cols, c = 4 * linear_index();
    if (c >= cols) return;
    vec4 sum = vec4(0.0);
    for (uint chunk = 0; chunk < args.chunks; chunk++) sum += load4(args.partials, chunk * cols, c, cols);
    if (args.accumulate != 0) sum = load4(args.y, 0, c, cols) + sum;
    store4(args.y, 0, c, cols, sum);
}
