; Generated from inlined.c by `make runtime`.
; 24baadcf6c5d8105e932213410292560fd5bdd4a9ffac3a3a2f5d0452390b9ad
%struct.die = type { i64, i64, i64, i64 }
define dso_local i64 @inlined_find(ptr %search, ptr %unit) #0 {
entry:
  %path = alloca [128 x %struct.die], align 16
  %0 = load ptr, ptr %search, align 8
  %call = call i32 %0(ptr %unit, ptr nonnull %path)
  br label %for.cond
for.cond:
  %at.0 = phi i64 [ 0, %entry ], [ %dec, %if.end ], [ %at.1, %if.end48 ]
  %end.0 = phi i32 [ %call, %entry ], [ %call5, %if.end ], [ %end.1, %if.end48 ]
  %arrayidx = getelementptr inbounds %struct.die, ptr %path, i64 %at.0
  %tobool.not = icmp eq i32 %end.0, 0
  br i1 %tobool.not, label %if.end6, label %if.then
if.then:
  %tobool1.not = icmp eq i64 %at.0, 0
  br i1 %tobool1.not, label %if.then2, label %if.end
if.then2:
  ret i64 0
if.end:
  %dec = add i64 %at.0, -1
  %sibling = getelementptr inbounds nuw i8, ptr %search, i64 8
  %1 = load ptr, ptr %sibling, align 8
  %arrayidx3 = getelementptr inbounds %struct.die, ptr %path, i64 %dec
  %arrayidx4 = getelementptr inbounds %struct.die, ptr %path, i64 %dec
  %call5 = call i32 %1(ptr nonnull %arrayidx3, ptr nonnull %arrayidx4)
  br label %for.cond
if.end6:
  %tag7 = getelementptr inbounds nuw i8, ptr %search, i64 16
  %2 = load ptr, ptr %tag7, align 8
  %call8 = call i32 %2(ptr nonnull %arrayidx)
  %cmp = icmp eq i32 %call8, 29
  br i1 %cmp, label %cond.true, label %cond.end
cond.true:
  %name9 = getelementptr inbounds nuw i8, ptr %search, i64 24
  %3 = load ptr, ptr %name9, align 8
  %call10 = call ptr %3(ptr nonnull %arrayidx)
  br label %cond.end
cond.end:
  %cond = phi ptr [ %call10, %cond.true ], [ null, %if.end6 ]
  %tobool11.not = icmp eq ptr %cond, null
  br i1 %tobool11.not, label %if.end32, label %land.lhs.true
land.lhs.true:
  %wanted = getelementptr inbounds nuw i8, ptr %search, i64 32
  %4 = load ptr, ptr %wanted, align 8
  %tobool12.not = icmp eq ptr %4, null
  br i1 %tobool12.not, label %if.then15, label %lor.lhs.false
lor.lhs.false:
  %wanted13 = getelementptr inbounds nuw i8, ptr %search, i64 32
  %5 = load ptr, ptr %wanted13, align 8
  br label %for.cond.i
for.cond.i:
  %wanted.addr.i.0 = phi ptr [ %5, %lor.lhs.false ], [ %incdec.ptr3.i, %if.end.i ]
  %name.addr.i.0 = phi ptr [ %cond, %lor.lhs.false ], [ %incdec.ptr.i, %if.end.i ]
  %6 = load i8, ptr %name.addr.i.0, align 1
  %7 = load i8, ptr %wanted.addr.i.0, align 1
  %cmp.i = icmp eq i8 %6, %7
  br i1 %cmp.i, label %for.body.i, label %if.end32
for.body.i:
  %8 = load i8, ptr %name.addr.i.0, align 1
  %tobool.i.not = icmp eq i8 %8, 0
  br i1 %tobool.i.not, label %is_same.exit, label %if.end.i
if.end.i:
  %incdec.ptr.i = getelementptr inbounds nuw i8, ptr %name.addr.i.0, i64 1
  %incdec.ptr3.i = getelementptr inbounds nuw i8, ptr %wanted.addr.i.0, i64 1
  br label %for.cond.i
is_same.exit:
  br i1 %cmp.i, label %if.then15, label %if.end32
if.then15:
  %count = getelementptr inbounds nuw i8, ptr %search, i64 64
  %9 = load i64, ptr %count, align 8
  %room = getelementptr inbounds nuw i8, ptr %search, i64 56
  %10 = load i64, ptr %room, align 8
  %cmp16 = icmp ult i64 %9, %10
  br i1 %cmp16, label %land.lhs.true17, label %if.else
land.lhs.true17:
  %wanted18 = getelementptr inbounds nuw i8, ptr %search, i64 32
  %11 = load ptr, ptr %wanted18, align 8
  %tobool19.not = icmp eq ptr %11, null
  br i1 %tobool19.not, label %if.else, label %if.then20
if.then20:
  %found = getelementptr inbounds nuw i8, ptr %search, i64 40
  %12 = load ptr, ptr %found, align 8
  %count21 = getelementptr inbounds nuw i8, ptr %search, i64 64
  %13 = load i64, ptr %count21, align 8
  %arrayidx22 = getelementptr inbounds %struct.die, ptr %12, i64 %13
  %14 = load i64, ptr %arrayidx, align 8
  store i64 %14, ptr %arrayidx22, align 8
  %unit.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 8
  %15 = load i64, ptr %unit.i, align 8
  %unit2.i = getelementptr inbounds nuw i8, ptr %arrayidx22, i64 8
  store i64 %15, ptr %unit2.i, align 8
  %abbrev.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 16
  %16 = load i64, ptr %abbrev.i, align 8
  %abbrev3.i = getelementptr inbounds nuw i8, ptr %arrayidx22, i64 16
  store i64 %16, ptr %abbrev3.i, align 8
  %padding.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 24
  %17 = load i64, ptr %padding.i, align 8
  %padding4.i = getelementptr inbounds nuw i8, ptr %arrayidx22, i64 24
  store i64 %17, ptr %padding4.i, align 8
  br label %if.end30
if.else:
  %count23 = getelementptr inbounds nuw i8, ptr %search, i64 64
  %18 = load i64, ptr %count23, align 8
  %room24 = getelementptr inbounds nuw i8, ptr %search, i64 56
  %19 = load i64, ptr %room24, align 8
  %cmp25 = icmp ult i64 %18, %19
  br i1 %cmp25, label %if.then26, label %if.end30
if.then26:
  %names = getelementptr inbounds nuw i8, ptr %search, i64 48
  %20 = load ptr, ptr %names, align 8
  %count27 = getelementptr inbounds nuw i8, ptr %search, i64 64
  %21 = load i64, ptr %count27, align 8
  %arrayidx28 = getelementptr inbounds ptr, ptr %20, i64 %21
  store ptr %cond, ptr %arrayidx28, align 8
  br label %if.end30
if.end30:
  %count31 = getelementptr inbounds nuw i8, ptr %search, i64 64
  %22 = load i64, ptr %count31, align 8
  %inc = add i64 %22, 1
  store i64 %inc, ptr %count31, align 8
  br label %if.end32
if.end32:
  switch i32 %call8, label %if.else45 [
    i32 29, label %land.lhs.true38
    i32 11, label %land.lhs.true38
    i32 46, label %land.lhs.true38
  ]
land.lhs.true38:
  %add = add i64 %at.0, 1
  %cmp39 = icmp ult i64 %add, 128
  br i1 %cmp39, label %if.then40, label %if.else45
if.then40:
  %23 = load ptr, ptr %search, align 8
  %inc42 = add i64 %at.0, 1
  %arrayidx43 = getelementptr inbounds %struct.die, ptr %path, i64 %inc42
  %call44 = call i32 %23(ptr nonnull %arrayidx, ptr nonnull %arrayidx43)
  br label %if.end48
if.else45:
  %sibling46 = getelementptr inbounds nuw i8, ptr %search, i64 8
  %24 = load ptr, ptr %sibling46, align 8
  %call47 = call i32 %24(ptr nonnull %arrayidx, ptr nonnull %arrayidx)
  br label %if.end48
if.end48:
  %at.1 = phi i64 [ %inc42, %if.then40 ], [ %at.0, %if.else45 ]
  %end.1 = phi i32 [ %call44, %if.then40 ], [ %call47, %if.else45 ]
  br label %for.cond
}
