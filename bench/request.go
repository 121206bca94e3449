package main

import (
	"bytes"
	"fmt"
	"strings"

	corerl "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
)

// template is a marshalled request in which the subjects' numbers can be replaced:
// a million requests need no memory and no marshalling while a server is measured.
type template struct {
	message  []byte
	numbers  []number
	subjects int // that it is for
}

// number is where one of nine digits stands: that of the first subject, plus plus.
type number struct{ at, plus int }

const digits = 9

// newTemplate returns a request for some subjects in a row, with a descriptor for
// each of the keys, which are separated by spaces. A subject's name has ten
// characters; `pool` and `refused` have one that all share. The zero hits are one.
func newTemplate(keys string, subjects int, hits uint32) (template, error) {
	blank := strings.Repeat("#", digits)
	r := &rls.RateLimitRequest{Domain: domain, HitsAddend: hits}
	var plus []int
	for i := range subjects {
		for key := range strings.FieldsSeq(keys) {
			value := "a" + blank
			if key == "pool" || key == "refused" {
				value = "all"
			} else {
				plus = append(plus, i)
			}
			r.Descriptors = append(r.Descriptors, &corerl.RateLimitDescriptor{
				Entries: []*corerl.RateLimitDescriptor_Entry{{Key: key, Value: value}},
			})
		}
	}
	message, err := proto.Marshal(r)
	if err != nil {
		return template{}, fmt.Errorf("marshal a request for %q: %w", keys, err)
	}
	t := template{message: message, subjects: subjects}
	at := 0
	for _, p := range plus {
		at += bytes.Index(message[at:], []byte(blank))
		t.numbers = append(t.numbers, number{at, p})
		at += digits
	}
	return t, nil
}

// write puts the subjects' numbers, from first on, into a copy of t.message.
func (t template) write(message []byte, first int) {
	for _, n := range t.numbers {
		v := first + n.plus
		for i := n.at + digits - 1; i >= n.at; i-- {
			message[i] = byte('0' + v%10)
			v /= 10
		}
	}
}
