#include <stdexcept>
#include <utility>

#include "kernel_table.h"

namespace hybrid_sparse {

const std::vector<Isa>& isas() {
  static const std::vector<Isa> list = [] {
    std::vector<Isa> result = {amx_bf16(), avx512_bf16(), avx512_vnni(), avx512(), avx2(), scalar()};
    if (result[1].runs_here() && !bf16_dot_is_fast()) std::swap(result[1], result[2]);
    return result;
  }();
  return list;
}

const Isa& find_isa(const std::string& name) {
  std::string valid = "auto";
  for (const Isa& isa : isas()) {
    if (!isa.runs_here()) continue;
    if (name == "auto" || name == isa.name) return isa;
    valid += ", ";
    valid += isa.name;
  }
  throw std::invalid_argument("isa=" + name + ": must be one that this machine runs: " + valid);
}

}  // namespace hybrid_sparse
