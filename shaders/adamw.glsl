// One AdamW update of four elements. The parameter is changed by one subtraction of the whole step, which rounds it
// once: p (1 - lr wd) first and the step after it would round it twice.
void adamw(vec4 g, inout vec4 m, inout vec4 v, inout vec4 p, float weight_decay) {
    m = fma(vec4(args.beta1), m, args.one_minus_beta1 * g);
    v = fma(vec4(args.beta2), v, args.one_minus_beta2 * (g * g));
    const float rate = args.step.learning_rate;
    const vec4 update = (m / args.step.bias_correction1) / (sqrt(v / args.step.bias_correction2) + args.eps);
    p = p - fma(vec4(rate * weight_decay), p, rate * update);
}
