// One invocation adds the tensors' sums in order: clip factor, finite flag, norm, loss.
#include "squares.glsl"

const float MOST = 1e18;  // of max_norm, for sums beyond float32: squares of what is clipped to it are within
const float LEAST = 1.1754944e-38;  // of a clip factor: below it a device may make it 0

bool finite(float x) { return !isnan(x) && !isinf(x); }

void main() {
    float total = 0.0, small = 0.0;
    bool beyond = false;
    for (uint i = 0; i < args.num_tensors; i++) {
        const float sum = args.sums.v[i];
        total += sum;
        small += small_of(sum);
        beyond = beyond || sum < 0.0;
    }
    beyond = beyond || isinf(total);
    float loss = 0.0;
    if (args.has_loss != 0) loss = args.loss.v[0];
    const float norm = beyond ? sqrt(small) / SMALL : sqrt(total);
    float clip = 1.0;
    if (args.max_norm > 0.0) clip = min(1.0, args.max_norm / (norm + args.eps));
    const bool clipped = args.max_norm > 0.0 && args.max_norm <= MOST && clip >= LEAST;
    const bool all_finite = finite(norm) && finite(loss) && (clipped || !beyond);
    args.state.v[0] = all_finite ? clip : 0.0;
    args.state.v[1] = all_finite ? 1.0 : 0.0;
    args.state.v[2] = norm;
    args.state.v[3] = loss;
}
