#include <stdexcept>
#include <utility>

#include "kernel_table.h"

namespace hybrid_sparse {

extern const Isa isa_avx512_bf16;
extern const Isa isa_avx512_vnni;
extern const Isa isa_avx512;
extern const Isa isa_avx2;
extern const Isa isa_scalar;

const std::vector<const Isa*>& isas() {
  static const std::vector<const Isa*> list = [] {
    std::vector<const Isa*> result = {&isa_avx512_bf16, &isa_avx512_vnni, &isa_avx512, &isa_avx2, &isa_scalar};
    if (isa_avx512_bf16.runs_here() && !bf16_dot_is_fast()) std::swap(result[0], result[1]);
    return result;
  }();
  return list;
}

const Isa& find_isa(const std::string& name) {
  std::string valid = "auto";
  for (const Isa* isa : isas()) {
    if (!isa->runs_here()) continue;
    if (name == "auto" || name == isa->name) return *isa;
    valid += std::string(", ") + isa->name;
  }
  throw std::invalid_argument("isa=" + name + ": must be one that this machine runs: " + valid);
}

}  // namespace hybrid_sparse
