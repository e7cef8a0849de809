#include "tesserae/watch/prometheus.h"

#include <cmath>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::watch {
namespace {

using Labels = std::vector<std::pair<std::string, std::string>>;

/// The member of an object, null where there is none.
const Json& member(const Json& object, const char* name) {
  static const Json none;
  const auto found = object.is_object() ? object.find(name) : object.end();
  return object.is_object() && found != object.end() ? *found : none;
}

const Json& element(const Json& array, size_t index) {
  static const Json none;
  return array.is_array() && index < array.size() ? array[index] : none;
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string escaped(const std::string& text) {
  std::string made;
  for (const char c : text) {
    if (c == '\\' || c == '"') made += '\\';
    c == '\n' ? made += "\\n" : made += c;
  }
  return made;
}

/// One family of samples: its heading comes with the first of them.
class Family {
 public:
  Family(std::string& out, const char* name, const char* help) : out_(out), name_(name), help_(help) {}

  void add(const Json& value, const Labels& labels = {}) {
    if (!value.is_number() || !std::isfinite(value.get<double>())) return;
    if (!std::exchange(begun_, true)) out_ += cat("# HELP ", name_, " ", help_, "\n# TYPE ", name_, " gauge\n");
    out_ += name_;
    for (size_t i = 0; i < labels.size(); ++i) {
      out_ += cat(i == 0 ? "{" : ",", labels[i].first, "=\"", escaped(labels[i].second), "\"");
    }
    out_ += cat(labels.empty() ? " " : "} ", value.dump(), "\n");
  }

  /// [ranks][columns], with both as labels; the columns have names.
  void add_table(const Json& table, const char* label, const Json& names) {
    if (!table.is_array() || !names.is_array()) return;
    for (size_t rank = 0; rank < table.size(); ++rank) {
      for (size_t i = 0; table[rank].is_array() && i < std::min(names.size(), table[rank].size()); ++i) {
        add(table[rank][i], {{"rank", std::to_string(rank)}, {label, text_of(names[i])}});
      }
    }
  }

  /// [columns]; labels_of(i): of one.
  template <class LabelsOf>
  void add_columns(const Json& values, const LabelsOf& labels_of) {
    for (size_t i = 0; values.is_array() && i < values.size(); ++i) add(values[i], labels_of(i));
  }

  /// [ranks][columns], but for zeros; labels_of(i): of a column, besides the rank.
  template <class LabelsOf>
  void add_used(const Json& table, const LabelsOf& labels_of) {
    for (size_t rank = 0; table.is_array() && rank < table.size(); ++rank) {
      for (size_t i = 0; table[rank].is_array() && i < table[rank].size(); ++i) {
        if (table[rank][i] == 0) continue;
        Labels labels = labels_of(i);
        labels.insert(labels.begin(), {"rank", std::to_string(rank)});
        add(table[rank][i], labels);
      }
    }
  }

  void add_ranks(const Json& values) {
    for (size_t rank = 0; values.is_array() && rank < values.size(); ++rank) {
      add(values[rank], {{"rank", std::to_string(rank)}});
    }
  }

 private:
  std::string& out_;
  const char* name_;
  const char* help_;
  bool begun_ = false;
};

}  // namespace

std::string prometheus(const Json& now, const Json& metrics, const RunFolder::Life& life) {
  std::string out;
  const auto family = [&out](const char* name, const char* help) { return Family(out, name, help); };
  const bool known = life.live || life.ended || life.died;  // not of a run without a monitor
  if (known) family("tesserae_up", "1 while the job tells of itself.").add(life.live ? 1 : 0);
  const Json& job = member(now, "job");
  const Json& step = member(now, "step");
  const bool told = step.is_number() && step != 0;  // not yet of a run that was resumed
  family("tesserae_step", "The last step that is over.").add(told ? step : member(metrics, "step"));
  family("tesserae_steps", "How many steps the job is to have.").add(member(job, "steps"));
  family("tesserae_ranks", "How many ranks the job has.").add(member(job, "ranks"));
  family("tesserae_loss", "Of the last step.").add(member(metrics, "loss"));
  family("tesserae_tokens_per_second", "Of the last step, all ranks.").add(member(metrics, "tokens_per_second"));
  family("tesserae_step_seconds", "Of the last step, the slowest rank.").add(member(now, "step_seconds"));
  family("tesserae_stage_seconds", "Of the last step.")
      .add_table(member(now, "seconds"), "stage", member(now, "stages"));
  const Json& memory = member(now, "memory");
  family("tesserae_memory_bytes", "Held at the end of the last step.")
      .add_table(member(memory, "bytes"), "category", member(memory, "categories"));
  family("tesserae_memory_peak_bytes", "The most that was held.").add_ranks(member(memory, "peak"));
  family("tesserae_memory_limit_bytes", "What there is.").add_ranks(member(memory, "limit"));
  const Json& traffic = member(now, "traffic");
  family("tesserae_traffic_bytes", "Sent in the last step.")
      .add_table(member(traffic, "bytes"), "verb", member(traffic, "verbs"));
  const Json& load = member(now, "load");
  family("tesserae_load", "Tokens, tokens of experts and attended pairs of the last step.")
      .add_table(member(load, "amounts"), "kind", member(load, "kinds"));
  family("tesserae_load_imbalance", "The most that a rank has, over the mean of all.")
      .add_columns(member(load, "imbalance"), [&load](size_t i) {
        return Labels{{"kind", text_of(element(member(load, "kinds"), i))}};
      });
  const Json& links = member(now, "links");
  const auto add_links = [&](const char* name, const char* help, const char* table) {
    family(name, help).add_used(member(links, table), [&links](size_t i) {
      const Json& hop = element(member(links, "hops"), i);
      Labels labels;
      for (const char* key : {"link", "lane", "verb", "ranks"}) labels.emplace_back(key, text_of(member(hop, key)));
      return labels;
    });
  };
  add_links("tesserae_link_bytes", "Sent over a kind of link in the last step, by hop.", "bytes");
  add_links("tesserae_link_calls", "In which that was.", "calls");
  add_links("tesserae_link_seconds", "That these took, waiting for others included.", "seconds");
  add_links("tesserae_link_bytes_per_second", "Of the quickest of the last steps.", "speed");

  const auto labels_of = [](const Json& slow) {
    return Labels{{"rank", text_of(member(slow, "rank"))}, {"stage", text_of(member(slow, "stage"))}};
  };
  const Json& slow = member(now, "slow");
  Family seconds = family("tesserae_slow_seconds", "What a slow rank takes beyond the others, a step.");
  for (size_t i = 0; slow.is_array() && i < slow.size(); ++i)
    seconds.add(member(slow[i], "seconds"), labels_of(slow[i]));
  Family share = family("tesserae_slow_share", "That, as a share of the whole job's step.");
  for (size_t i = 0; slow.is_array() && i < slow.size(); ++i) share.add(member(slow[i], "share"), labels_of(slow[i]));
  const Json& ranks = member(now, "ranks");
  Family age = family("tesserae_rank_heard_seconds", "Since the rank was last heard of.");
  for (size_t i = 0; ranks.is_array() && i < ranks.size(); ++i) {
    const Json then = member(ranks[i], "age");  // when rank 0 told it
    if (!then.is_number()) continue;
    age.add(then.get<double>() + (life.ended ? 0 : life.silent_seconds), {{"rank", text_of(member(ranks[i], "rank"))}});
  }
  return out;
}

}  // namespace tesserae::watch
