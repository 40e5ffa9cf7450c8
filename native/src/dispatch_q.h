// From a matrix's format to the template made for it. Included inside an instruction set's namespace, which supplies `tile_of`, or
// `tiles_of` and HR_SEVERAL_TILES.
#ifndef HR_SEVERAL_TILES
template <Codes C, Scales S>
static void tiles_of(const Matrix& m, int64_t t, int64_t tiles, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  for (int64_t i = 0; i < tiles; i++) tile_of<C, S>(m, t + i, x, row0, rows, out + i * kTile, ldo);
}
#endif
static void gemm_q(const Matrix& m, int64_t t, int64_t tiles, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  switch (m.format.scales) {
    case Scales::plain:
      switch (m.format.codes) {
        case Codes::u4: return tiles_of<Codes::u4, Scales::plain>(m, t, tiles, x, row0, rows, out, ldo);
        case Codes::u5: return tiles_of<Codes::u5, Scales::plain>(m, t, tiles, x, row0, rows, out, ldo);
        default: return tiles_of<Codes::s8, Scales::plain>(m, t, tiles, x, row0, rows, out, ldo);
      }
    case Scales::min:
      if (m.format.codes == Codes::u4) return tiles_of<Codes::u4, Scales::min>(m, t, tiles, x, row0, rows, out, ldo);
      return tiles_of<Codes::u5, Scales::min>(m, t, tiles, x, row0, rows, out, ldo);
    case Scales::kmin:
      if (m.format.codes == Codes::u4) return tiles_of<Codes::u4, Scales::kmin>(m, t, tiles, x, row0, rows, out, ldo);
      return tiles_of<Codes::u5, Scales::kmin>(m, t, tiles, x, row0, rows, out, ldo);
    default: return tiles_of<Codes::u6, Scales::k16>(m, t, tiles, x, row0, rows, out, ldo);
  }
}
