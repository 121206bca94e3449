package main

import (
	"fmt"
	"strings"

	weirv1 "weir/proto/weir/v1"
)

// parseDescriptors reads the values of -d.
func parseDescriptors(texts []string) ([]*weirv1.Descriptor, error) {
	var list []*weirv1.Descriptor
	for _, text := range texts {
		d := &weirv1.Descriptor{}
		for _, entry := range strings.Split(text, ",") {
			key, value, ok := strings.Cut(entry, "=")
			if !ok || key == "" {
				return nil, fmt.Errorf("-d %q: %q is not key=value; example: -d account=alice,plan=trial", text, entry)
			}
			d.Entries = append(d.Entries, &weirv1.Entry{Key: key, Value: value})
		}
		list = append(list, d)
	}
	return list, nil
}
