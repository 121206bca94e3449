package redis

import (
	_ "embed"
	"strings"
)

var (
	//go:embed common.lua
	commonSource string
	//go:embed decide.lua
	decideSource string
	//go:embed release.lua
	releaseSource string
	//go:embed renew.lua
	renewSource string
	//go:embed lease.lua
	leaseSource string
	//go:embed debit.lua
	debitSource string
	//go:embed settle.lua
	settleSource string
	//go:embed inspect.lua
	inspectSource string
	//go:embed leases.lua
	leasesSource string
	//go:embed reset.lua
	resetSource string
)

// scripts are the Lua scripts of one version of weir. Versions that run side by
// side share states: see docs/decisions/0007-state-formats.md.
type scripts struct{ decide, release, renew, settle, inspect, leases, reset *script }

// current are the scripts as they are.
var current = newScripts(func(source string) string { return source })

// newScripts returns the scripts, each changed: tests make other versions so.
func newScripts(change func(source string) string) scripts {
	whole := func(source string, shared ...string) *script {
		first, rest, _ := strings.Cut(source, "\n") // #!lua must be the first line
		return newScript(change(first + "\n" + commonSource + strings.Join(shared, "") + rest))
	}
	return scripts{
		decide:  whole(decideSource),
		release: whole(releaseSource, leaseSource, debitSource),
		renew:   whole(renewSource, leaseSource),
		settle:  whole(settleSource, leaseSource, debitSource),
		inspect: whole(inspectSource),
		leases:  whole(leasesSource),
		reset:   whole(resetSource),
	}
}
