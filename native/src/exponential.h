// exp and tanh over 16-lane vectors. Included after an isa_*.h, in namespace HR_ISA.
#pragma once

namespace headrace::HR_ISA {

// exp of x <= 88 with about 1 ulp of error; 0 below -87, NaN stays NaN. Range reduction by ln 2 in two parts, then a
// Taylor-like minimax polynomial on [-ln2/2, ln2/2].
inline F exp_falling(F x) {
  const F c = max(set1(-87.33654f), x);
  const F n = round(mul(c, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return zero_below(x, -87.33654f, scale2(p, n));
}
// 2^x of x <= 0 to 3e-6 of itself, 2^-100 of what is less than -100; NaN stays NaN. Adding 1.5 * 2^23 rounds x to an integer, which
// the sum then has in its lowest bits.
inline F exp2_coarse(F x) {
  const F c = max(set1(-100.0f), x), whole = add(c, set1(12582912.0f));
  const F r = sub(c, sub(whole, set1(12582912.0f)));
  F p = set1(9.582852945e-03f);
  p = fma(p, r, set1(5.590642616e-02f));
  p = fma(p, r, set1(2.402409911e-01f));
  p = fma(p, r, set1(6.931241751e-01f));
  return add_exponent(fma(p, r, set1(1.0f)), whole);
}
inline F exp(F x) {  // of any x
  return exp_falling(sub(zero(), max(set1(-88.37626f), sub(zero(), x))));  // min(88.4, x), NaN kept
}
inline float exponential(float x) {
  float v[16];
  store(v, exp(set1(x)));
  return v[0];
}
inline F tanh(F x) {  // 1 - 2 / (exp(2x) + 1)
  return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
}

}  // namespace headrace::HR_ISA
