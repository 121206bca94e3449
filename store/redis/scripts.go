package redis

// scripts are the Lua scripts of one version of weir. Versions that run side by
// side share states: see docs/decisions/0007-state-formats.md.
type scripts struct{ decide, release, renew, inspect *script }

func newScripts(decide, release, renew, inspect string) scripts {
	return scripts{newScript(decide), newScript(release), newScript(renew), newScript(inspect)}
}

var current = newScripts(decideSource, releaseSource, renewSource, inspectSource)
