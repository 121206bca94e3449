package main

import (
	"fmt"
	"io"
	"strings"
)

// printResults prints what became of each lease, without the prefix that its kind
// of result has on the wire. It fails if some could not be looked at, with what to
// do about that.
func printResults[S interface {
	comparable
	fmt.Stringer
}](w io.Writer, results []S, prefix string, unavailable S, remedy string,
) error {
	failed := 0
	for _, r := range results {
		if r == unavailable {
			failed++
		}
		if _, err := fmt.Fprintln(w, strings.TrimPrefix(r.String(), prefix)); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d leases: the service's store did not answer, or another replica granted them while it did not; %s", failed, len(results), remedy)
	}
	return nil
}
