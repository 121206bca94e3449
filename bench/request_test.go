package main

import (
	"bytes"
	"slices"
	"testing"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
)

func TestARequestIsForTheSubjectsThatAreWrittenIntoIt(t *testing.T) {
	for _, test := range []struct {
		keys     string
		subjects int
		first    int
		want     []string
	}{
		{"account", 1, 7, []string{"account=a000000007"}},
		{"account", 3, 999_999_998 - 1, []string{"account=a999999997", "account=a999999998", "account=a999999999"}},
		{"job pool", 1, 1_234_567, []string{"job=a001234567", "pool=all"}},
		{"a b", 2, 10, []string{"a=a000000010", "b=a000000010", "a=a000000011", "b=a000000011"}},
		{"refused", 1, 5, []string{"refused=all"}},
	} {
		request, err := newTemplate(test.keys, test.subjects, 3)
		if err != nil {
			t.Fatal(err)
		}
		message := bytes.Clone(request.message)
		request.write(message, 42) // what stood there before is replaced
		request.write(message, test.first)
		var r rls.RateLimitRequest
		if err := proto.Unmarshal(message, &r); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, d := range r.GetDescriptors() {
			got = append(got, d.GetEntries()[0].GetKey()+"="+d.GetEntries()[0].GetValue())
		}
		if !slices.Equal(got, test.want) || r.GetDomain() != domain || r.GetHitsAddend() != 3 {
			t.Errorf("the request for %q from %d on asks %q for %v, %d hits; want %v", test.keys, test.first, r.GetDomain(), got, r.GetHitsAddend(), test.want)
		}
	}
}
