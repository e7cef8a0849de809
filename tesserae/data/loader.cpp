#include "tesserae/data/loader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "tesserae/base/checked.h"
#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"

namespace tesserae::data {

namespace {

void at_least_one(std::string_view field, int64_t value) {
  if (value < 1) throw InvalidArgument("Loader", cat(field, " is ", value, "; it must be >= 1"));
}

LoaderOptions checked(const LoaderOptions& options) {
  at_least_one("sequence_length", options.sequence_length);
  at_least_one("batch_per_rank", options.batch_per_rank);
  at_least_one("accumulate", options.accumulate);
  at_least_one("ranks", options.ranks);
  if (options.rank < 0 || options.rank >= options.ranks) {
    throw InvalidArgument("Loader", cat("rank is ", options.rank, " of ", options.ranks));
  }
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    throw InvalidArgument("Loader",
                          cat("validation_fraction is ", options.validation_fraction, "; it must lie in [0, 1)"));
  }
  checked_mul(checked_mul(options.batch_per_rank, options.accumulate), options.ranks);
  return options;
}

int64_t count_samples(const TokenStream& stream, const LoaderOptions& options) {
  const int64_t samples = (stream.size() - 1) / options.sequence_length;
  const int64_t needed = options.validation_fraction > 0 ? 2 : 1;
  if (samples >= needed) return samples;
  throw InvalidArgument(
      "Loader", cat("the data has ", stream.size(), " tokens, too few for ", needed, " samples of ",
                    options.sequence_length, " + 1", needed == 2 ? " (one to train on, one to validate with)" : "",
                    "; shorten sequence_length or give more data"));
}

int64_t count_validation(int64_t samples, double fraction) {
  if (fraction == 0) return 0;
  return std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(samples) * fraction), 1, samples - 1);
}

std::vector<Source> checked(std::vector<Source> sources) {
  if (sources.empty()) throw InvalidArgument("Loader", "there is no source to read; give one");
  if (std::ranges::any_of(sources, [](const Source& source) { return source.stream == nullptr; }))
    throw InvalidArgument("Loader", "a source has no stream");
  const int64_t vocabulary = sources[0].stream->vocabulary();
  for (const Source& source : sources) {
    if (source.stream->vocabulary() == vocabulary) continue;
    throw InvalidArgument("Loader", cat("sources of a mixture have vocabularies of ", vocabulary, " and ",
                                        source.stream->vocabulary(), "; they must come from one tokenizer"));
  }
  return sources;
}

std::vector<int64_t> hold_out(const std::vector<Source>& sources, const LoaderOptions& options) {
  std::vector<int64_t> held;
  for (const Source& source : sources) {
    held.push_back(count_validation(count_samples(*source.stream, options), options.validation_fraction));
  }
  return held;
}

Mixture mix(const std::vector<Source>& sources, const LoaderOptions& options,
            const std::function<int64_t(size_t source)>& samples_of) {
  std::vector<int64_t> samples;
  std::vector<double> weights;
  for (size_t source = 0; source < sources.size(); ++source) {
    samples.push_back(samples_of(source));
    weights.push_back(sources[source].weight);
  }
  return {samples, weights, options.seed};
}

}  // namespace

Loader::Loader(std::vector<Source> sources, const LoaderOptions& options)
    : sources_(checked(std::move(sources))),
      options_(checked(options)),
      held_out_(hold_out(sources_, options_)),
      training_(mix(sources_, options_, [this](size_t source) { return first_held_out(source); })) {
  if (options_.validation_fraction == 0) return;
  validation_.emplace(mix(sources_, options_, [this](size_t source) { return held_out_[source]; }));
}

int64_t Loader::first_held_out(size_t source) const {
  return count_samples(*sources_[source].stream, options_) - held_out_[source];
}

std::vector<std::string> Loader::fingerprints() const {
  std::vector<std::string> all;
  for (const Source& source : sources_) all.push_back(to_hex(source.stream->fingerprint()));
  return all;
}

int64_t Loader::global_batch() const {
  return options_.batch_per_rank * options_.accumulate * options_.ranks;
}

Position Loader::after(int64_t steps, const Position& start) const {
  return training_.advance(start, steps * global_batch());
}

Batch Loader::training_batch(const Position& step, int64_t micro) {
  const int64_t before = (micro * options_.ranks + options_.rank) * options_.batch_per_rank;
  return read([&](int64_t i) { return training_.at(training_.advance(step, before + i)); });
}

Batch Loader::validation_batch(int64_t index) {
  if (!validation_) throw InvalidArgument("Loader::validation_batch", "validation_fraction is 0: nothing is held out");
  // The same order every time, so that losses of different steps can be compared.
  const int64_t before = (index * options_.ranks + options_.rank) * options_.batch_per_rank;
  return read([&](int64_t i) {
    const auto [source, sample] = validation_->at({0, (before + i) % validation_->samples()});
    return Mixture::Sample{source, first_held_out(source) + sample};
  });
}

Batch Loader::read(const std::function<Mixture::Sample(int64_t i)>& sample_of) {
  const int64_t length = options_.sequence_length;
  Batch batch;
  batch.tokens = at::empty({options_.batch_per_rank, length}, at::kLong);
  batch.targets = at::empty({options_.batch_per_rank, length}, at::kLong);
  std::vector<int64_t> tokens(static_cast<size_t>(length) + 1);
  for (int64_t i = 0; i < options_.batch_per_rank; ++i) {
    const auto [source, sample] = sample_of(i);
    sources_[source].stream->read(sample * length, tokens);
    std::copy_n(tokens.data(), length, batch.tokens.mutable_data_ptr<int64_t>() + i * length);
    std::copy_n(tokens.data() + 1, length, batch.targets.mutable_data_ptr<int64_t>() + i * length);
  }
  return batch;
}

}  // namespace tesserae::data
