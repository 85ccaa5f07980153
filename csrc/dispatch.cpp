#include <stdexcept>

#include "kernel_table.h"

namespace hybrid_sparse {

extern const Isa isa_avx512_bf16;
extern const Isa isa_avx512;
extern const Isa isa_avx2;
extern const Isa isa_scalar;

const std::vector<const Isa*>& isas() {
  static const std::vector<const Isa*> list = {&isa_avx512_bf16, &isa_avx512, &isa_avx2, &isa_scalar};
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
