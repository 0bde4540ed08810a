// One invocation adds the tensors' sums in order: clip factor, finite flag, norm, loss.
bool finite(float x) { return !isnan(x) && !isinf(x); }

void main() {
    float total = 0.0;
    for (uint i = 0; i < args.num_tensors; i++) total += args.sums.v[i];
    float loss = 0.0;
    if (args.has_loss != 0) loss = args.loss.v[0];
    const bool all_finite = finite(total) && finite(loss);
    const float norm = finite(total) ? sqrt(total) : abs(total);
    float clip = 1.0;
    if (args.max_norm > 0.0) clip = min(1.0, args.max_norm / (norm + args.eps));
    args.state.v[0] = all_finite ? clip : 0.0;
    args.state.v[1] = all_finite ? 1.0 : 0.0;
    args.state.v[2] = norm;
    args.state.v[3] = loss;
}
