package server_test

import (
	"bytes"
	"slices"
	"testing"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"weir/store/storetest"
)

func TestBytesThatAreNoMessageAreInvalid(t *testing.T) {
	s := serve(t, hourPolicy)
	entry := func(key, value string) []byte {
		b := protowire.AppendTag(nil, 1, protowire.BytesType)
		b = protowire.AppendString(b, key)
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		return protowire.AppendString(b, value)
	}
	nested := func(b []byte, field protowire.Number) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), b)
	}
	message := func(domain, key, value string) []byte {
		b := protowire.AppendTag(nil, 1, protowire.BytesType)
		b = protowire.AppendString(b, domain)
		return append(b, nested(nested(entry(key, value), 1), 2)...)
	}
	good, bad := message("d", "a", "1"), message("d", "a", "\xff\xfe")
	for _, test := range []struct {
		name   string
		method string
		bytes  []byte
		want   string
	}{
		{"a value that is no UTF-8", shouldRateLimit, message("d", "a", "\xff\xfe"), "OK [OK 4]"},
		{"the same once more", shouldRateLimit, message("d", "a", "\xff\xfe"), "OK [OK 3]"},
		{"another", shouldRateLimit, message("d", "a", "\xff\xff"), "OK [OK 4]"},
		{"text as long", shouldRateLimit, message("d", "a", "??"), "OK [OK 4]"},
		{"a message that is cut off in such a value", shouldRateLimit, bad[:len(bad)-1], "InvalidArgument"},
		{"a key that is no UTF-8", shouldRateLimit, message("d", "a\x80", "1"), "InvalidArgument"},
		{"a domain that is no UTF-8", shouldRateLimit, message("d\xc3", "a", "1"), "InvalidArgument"},
		{"a message that is cut off", shouldRateLimit, good[:len(good)-1], "InvalidArgument"},
		{"noise", shouldRateLimit, []byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), "InvalidArgument"},
		{"nothing", shouldRateLimit, nil, "InvalidArgument"},
		{"an unknown field", shouldRateLimit, append(slices.Clone(good), nested([]byte("?"), 1000)...), "OK [OK 4]"},
		{"a field of another type", shouldRateLimit, append(slices.Clone(good), nested([]byte("?"), 3)...), "OK [OK 3]"},
		{"two million empty descriptors", shouldRateLimit, bytes.Repeat([]byte{0x12, 0}, 2_000_000), "InvalidArgument"},
		{"a descriptor of a million empty entries", shouldRateLimit, nested(bytes.Repeat([]byte{0x0a, 0}, 1_000_000), 2), "InvalidArgument"},
		{"a million empty leases", "/weir.v1.LeaseService/Release", bytes.Repeat([]byte{0x0a, 0}, 1_000_000), "InvalidArgument"},
		{"LeaseService too", "/weir.v1.LeaseService/Acquire", message("d", "a", "\xff"), "InvalidArgument"},
		{"and its Release", "/weir.v1.LeaseService/Release", nested([]byte("\xff"), 1), "InvalidArgument"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := send(storetest.Context(t), s.conn, test.method, test.bytes)
			got := status.Code(err).String()
			if err == nil {
				got = answerText(r)
			}
			if got != test.want {
				t.Errorf("%.100q = %s, want %s (%v)", test.bytes, got, test.want, err)
			}
		})
	}
	script(t, s, "[a=1]", "OK [OK 2]")
}
