#include "tesserae/doctor/finding.h"

#include <algorithm>

namespace tesserae::doctor {

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::good:
      return "good";
    case Verdict::note:
      return "note";
    case Verdict::warning:
      return "warning";
    case Verdict::wrong:
      return "WRONG";
  }
  return "";
}

Verdict worst_of(const Findings& findings) {
  Verdict worst = Verdict::good;
  for (const Finding& finding : findings) worst = std::max(worst, finding.verdict);
  return worst;
}

}  // namespace tesserae::doctor
