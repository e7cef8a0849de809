#include "tesserae/os/symbols.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <thread>

namespace tesserae::os {

[[gnu::noinline]] int a_function_with_a_name(int value) {
  asm volatile("");
  return value;
}

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

[[gnu::noinline]] int one_that_is_not_exported(int value) {
  asm volatile("");
  return value;
}

template <class Function>
uintptr_t address_of(Function* function) {
  return reinterpret_cast<uintptr_t>(function);
}

std::string name_of(uintptr_t address) {
  return names_of_code(std::array{address}).at(address);
}

TEST(Symbols, OfTheProgramAndOfLibraries) {
  const int value = a_function_with_a_name(1) + one_that_is_not_exported(1);
  EXPECT_EQ(value, 2);
  EXPECT_THAT(name_of(address_of(a_function_with_a_name) + 1),
              AllOf(StartsWith("tesserae::os::a_function_with_a_name(int) ("), HasSubstr("test_")));
  EXPECT_THAT(name_of(address_of(one_that_is_not_exported)), HasSubstr("one_that_is_not_exported(int)"));
  EXPECT_THAT(name_of(address_of(::abort)), MatchesRegex("abort \\(.+\\)"));
}

TEST(Symbols, WhatIsNoCodeOfALibraryIsANumber) {
  EXPECT_EQ(name_of(0x10), "0x10");
  EXPECT_THAT(names_of_code({}), ::testing::IsEmpty());
}

TEST(Symbols, WhereNoSymbolIsKnownTheOffsetInTheFile) {
  static const char table[4096] = {1};  // in the program, and no function
  EXPECT_THAT(name_of(reinterpret_cast<uintptr_t>(&table[100])), MatchesRegex(".+\\+0x[0-9a-f]+"));
}

TEST(Symbols, AForkedChildFindsNoLockThatItsParentHeld) {
  std::atomic<bool> stop{false};
  std::thread asks([&] {
    while (!stop) name_of(0x10);
  });
  int status = 0;
  for (int i = 0; i < 300 && status == 0; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      name_of(0x10);
      ::_exit(0);
    }
    ASSERT_EQ(::waitpid(child, &status, 0), child);
  }
  stop = true;
  asks.join();
  EXPECT_EQ(status, 0);
}

TEST(Symbols, LongNamesAreShortened) {
  EXPECT_EQ(short_symbol("f(std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> > const&)"),
            "f(std::string const&)");
  EXPECT_EQ(short_symbol("A<B<C<int>>>::call(int)", 22), "A<B<...>>::call(int)");
  EXPECT_EQ(short_symbol("A<B<C<int>>>::call(int)", 18), "A<...>::call(int)");
  EXPECT_EQ(short_symbol("A<B<C<int>>>::call(int, float)", 20), "A<...>::call(...)");
  EXPECT_EQ(short_symbol("A<long_name>::operator<(A<long_name>)", 30), "A<...>::operator<(A<...>)");
  EXPECT_EQ(short_symbol("A<long_name>::operator<<(A<long_name>)", 30), "A<...>::operator<<(A<...>)");
  EXPECT_EQ(short_symbol("A<long_name>::operator->(A<long_name>)", 30), "A<...>::operator->(A<...>)");
  EXPECT_EQ(short_symbol("(anonymous namespace)::run(long_name, long_name)", 40), "(anonymous namespace)::run(...)");
  EXPECT_EQ(short_symbol(std::string(500, 'x')).size(), 160u);
  EXPECT_EQ(short_symbol("broken<<<((", 5), "br...");
}

}  // namespace
}  // namespace tesserae::os
