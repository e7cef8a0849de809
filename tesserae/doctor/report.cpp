#include "tesserae/doctor/report.h"

#include <algorithm>

#include "tesserae/base/error.h"

namespace tesserae::doctor {
namespace {

constexpr Verdict verdicts[] = {Verdict::good, Verdict::note, Verdict::warning, Verdict::wrong};

/// A finding, and who made it.
struct Shared {
  Finding finding;
  std::vector<int> ranks;
};

bool alike(const Finding& a, const Finding& b) {
  return a.subject == b.subject && a.verdict == b.verdict && a.fact == b.fact && a.advice == b.advice;
}

/// "0-3, 6".
std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += cat(text.empty() ? "" : ", ", ranks[i], end - i > 1 ? cat("-", ranks[end - 1]) : "");
    i = end;
  }
  return text;
}

}  // namespace

nlohmann::ordered_json to_json(const RankReport& report) {
  nlohmann::ordered_json findings = nlohmann::ordered_json::array();
  for (const Finding& each : report.findings) {
    findings.push_back(
        {{"subject", each.subject}, {"verdict", name_of(each.verdict)}, {"fact", each.fact}, {"advice", each.advice}});
  }
  return {{"rank", report.rank}, {"host", report.host}, {"findings", std::move(findings)}};
}

RankReport report_from(const std::string& text) {
  try {
    const auto json = nlohmann::ordered_json::parse(text);
    RankReport report{.rank = json.at("rank"), .host = json.at("host"), .findings = {}};
    for (const auto& each : json.at("findings")) {
      const std::string name = each.at("verdict");
      const auto* const verdict = std::find_if(std::begin(verdicts), std::end(verdicts),
                                               [&name](Verdict known) { return name == name_of(known); });
      if (verdict == std::end(verdicts)) throw InvalidArgument("report_from", cat("no verdict is called '", name, "'"));
      report.findings.push_back({each.at("subject"), *verdict, each.at("fact"), each.at("advice")});
    }
    return report;
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument("report_from", cat("not the report of a rank: ", error.what()));
  }
}

std::string in_words(const std::vector<RankReport>& reports) {
  std::vector<Shared> all;
  for (const RankReport& report : reports) {
    for (const Finding& finding : report.findings) {
      const auto known = std::find_if(all.begin(), all.end(),
                                      [&finding](const Shared& shared) { return alike(shared.finding, finding); });
      if (known != all.end()) {
        known->ranks.push_back(report.rank);
        continue;
      }
      // Beside what others say of the same subject.
      auto place = std::find_if(all.rbegin(), all.rend(),
                                [&finding](const Shared& shared) { return shared.finding.subject == finding.subject; });
      all.insert(place == all.rend() ? all.end() : place.base(), {finding, {report.rank}});
    }
  }
  std::string text;
  for (const auto& [finding, ranks] : all) {
    std::string head = name_of(finding.verdict), subject = finding.subject;
    head.resize(std::max<size_t>(head.size(), 8), ' ');
    subject.resize(std::max<size_t>(subject.size(), 16), ' ');
    const std::string who = ranks.size() == reports.size() || reports.size() == 1
                                ? ""
                                : cat(" (rank", ranks.size() > 1 ? "s " : " ", list_of(ranks), ")");
    text += cat(head, " ", subject, " ", finding.fact, who, "\n");
    if (!finding.advice.empty()) text += cat(std::string(26, ' '), "-> ", finding.advice, "\n");
  }
  return text;
}

}  // namespace tesserae::doctor
