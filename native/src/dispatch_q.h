// From a matrix's format to the template made for it. Included inside an instruction set's namespace.
static void gemm_q(const Matrix& m, int64_t t, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  switch (m.format.scales) {
    case Scales::plain:
      switch (m.format.codes) {
        case Codes::u4: return tile_of<Codes::u4, Scales::plain>(m, t, x, row0, rows, out, ldo);
        case Codes::u5: return tile_of<Codes::u5, Scales::plain>(m, t, x, row0, rows, out, ldo);
        default: return tile_of<Codes::s8, Scales::plain>(m, t, x, row0, rows, out, ldo);
      }
    case Scales::min:
      if (m.format.codes == Codes::u4) return tile_of<Codes::u4, Scales::min>(m, t, x, row0, rows, out, ldo);
      return tile_of<Codes::u5, Scales::min>(m, t, x, row0, rows, out, ldo);
    case Scales::kmin:
      if (m.format.codes == Codes::u4) return tile_of<Codes::u4, Scales::kmin>(m, t, x, row0, rows, out, ldo);
      return tile_of<Codes::u5, Scales::kmin>(m, t, x, row0, rows, out, ldo);
    default: return tile_of<Codes::u6, Scales::k16>(m, t, x, row0, rows, out, ldo);
  }
}
