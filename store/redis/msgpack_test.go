package redis

import (
	"math"
	"slices"
	"strings"
	"testing"
)

// FuzzUnpacker reads what Redis would never reply: nothing panics or asks for memory, and
// nothing is left unsaid.
func FuzzUnpacker(f *testing.F) {
	for _, reply := range []string{"", "\x90", packed(1, -1, 1<<40, "text", []any{1, "x"}), "\xdd\xff\xff\xff\xff\x01", "\xdb\xff\xff\xff\xff", "\xcf\xff", "\xc1"} {
		f.Add(reply, "int text array")
	}
	f.Fuzz(func(t *testing.T, reply, asked string) {
		u := unpacker{rest: reply}
		for word := range strings.FieldsSeq(asked) {
			before := len(u.rest)
			switch word {
			case "int":
				u.int()
			case "text":
				if got := u.text(); len(got) > len(reply) {
					t.Fatalf("a text of %d bytes from %d", len(got), len(reply))
				}
			case "array":
				u.array()
			default:
				continue
			}
			if u.err == nil && len(u.rest) >= before {
				t.Fatalf("%s took nothing of %q, and is no error", word, reply)
			}
		}
		if u.err == nil && u.rest != "" && u.end() == nil {
			t.Fatalf("%q is left, and is no error", u.rest)
		}
	})
}

func TestWhatIsPackedIsUnpacked(t *testing.T) {
	numbers := []int64{0, 1, 31, 32, 127, 128, 255, 256, 1<<16 - 1, 1 << 16, 1<<32 - 1, 1 << 32, 1<<53 - 1, -1, -32, -33, -128, -129, -1 << 31, -1<<53 + 1, math.MaxInt64, math.MinInt64}
	texts := []string{"", "x", strings.Repeat("x", 31), strings.Repeat("x", 32), strings.Repeat("\xff", 255), strings.Repeat("\x00", 256), strings.Repeat("x", 70_000)}
	var p packer
	p.ints(numbers...)
	for _, s := range texts {
		p.string(s)
	}
	u := unpacker{rest: string(p.item(7))}
	if keys := u.int(); keys != 7 {
		t.Fatalf("%d keys, want 7", keys)
	}
	got := make([]int64, len(numbers))
	for i := range got {
		got[i] = u.int()
	}
	if !slices.Equal(got, numbers) {
		t.Errorf("numbers = %v, want %v", got, numbers)
	}
	for _, want := range texts {
		if got := u.text(); got != want {
			t.Errorf("a text = %.40q of %d bytes, want %.40q of %d", got, len(got), want, len(want))
		}
	}
	if err := u.end(); err != nil {
		t.Error(err)
	}
}
