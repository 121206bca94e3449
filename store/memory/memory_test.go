package memory_test

import (
	"testing"

	"weir/store/memory"
	"weir/store/storetest"
)

func TestScenarios(t *testing.T) {
	storetest.RunScenarios(t, "../testdata", func(_ *testing.T, now func() int64) storetest.Fixture {
		return storetest.Fixture{Store: memory.New(memory.Options{Now: now})}
	})
}
