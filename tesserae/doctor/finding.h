#pragma once

#include <string>
#include <vector>

namespace tesserae::doctor {

/// How a finding is meant, from harmless to not.
enum class Verdict {
  good,
  note,     ///< works; worth knowing
  warning,  ///< works, but slower or with less than it could, or not for every job
  wrong,    ///< training will not run as asked
};

/// "good", "note", "warning", "WRONG".
const char* name_of(Verdict verdict);

/// One thing that was looked at.
struct Finding {
  std::string subject;  ///< a word or two
  Verdict verdict = Verdict::good;
  std::string fact;    ///< what is there, with values
  std::string advice;  ///< what to do; empty where all is well
};

using Findings = std::vector<Finding>;

/// The worst of them; good if there are none.
Verdict worst_of(const Findings& findings);

}  // namespace tesserae::doctor
