// Sums of squares beyond float32, of elements that are finite: minus the sum of the squares of SMALL times each. So the
// sign tells, and no bit of another sum changes (after Blue 1978, ACM TOMS 4, and LAPACK's scaled sums).
const float SMALL = 1.262177448353619e-29;  // 2^-96: squares of all that is finite add up, and what is lost is below 2^-60

float as_small(float sum) { return isinf(sum) || isnan(sum) ? sum : -sum; }

// A sum of squares of either kind, times SMALL^2.
float small_of(float sum) { return sum < 0.0 ? -sum : (sum * SMALL) * SMALL; }
