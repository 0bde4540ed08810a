// One SGD update of four elements; MOMENTUM says whether there is a momentum buffer b. As in adamw.glsl the parameter is
// rounded once.
void sgd(vec4 g, inout vec4 b, inout vec4 p, float weight_decay) {
    vec4 direction = g;
#if MOMENTUM
    b = fma(vec4(args.momentum), b, g);
    direction = args.nesterov != 0 ? fma(vec4(args.momentum), b, g) : b;
#endif
    const float rate = args.step.learning_rate;
    p = p - fma(vec4(rate * weight_decay), p, rate * direction);
}
