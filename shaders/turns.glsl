// TURNS rounds of a loop at a time, in order. ROUND is a macro of one round, given how many rounds it lies behind the first.
// Written out as text: SwiftShader leaves a loop over a constant a loop, and tests of constants tests.
#if TURNS == 1
#define IN_TURNS(ROUND) { ROUND(0); }
#elif TURNS == 4
#define IN_TURNS(ROUND) { ROUND(0); ROUND(1); ROUND(2); ROUND(3); }
#else
#error "there are kernels for 1 and 4 turns"
#endif
